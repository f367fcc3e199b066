# SPDX-License-Identifier: Apache-2.0
"""The reference trainer of `offstage train`: small, complete, and an example of every part of offstage.

Read `loop.py` first; `config.py` has every setting, `model.py` the transformer, `data.py` the batches.
"""
