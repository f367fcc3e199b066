# SPDX-License-Identifier: Apache-2.0
"""Sleep and wake: a training job gives its device memory to another one, and takes it back."""
