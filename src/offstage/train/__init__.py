# SPDX-License-Identifier: Apache-2.0
"""The reference trainer, behind `offstage train`: small, complete, and the place where all of offstage is wired.

Read `loop.py` first; `config.py` has every setting, `model.py` the transformer, `data.py` the batches.
"""
