# SPDX-License-Identifier: Apache-2.0
"""Megatron-core: its optimizers with their state off the device, its flags, its layers' activations."""

from offstage.integrations.megatron.activations import ActivationOffloads, offload_activations
from offstage.integrations.megatron.flags import MegatronFlags, config_from_megatron, switch_off

__all__ = ["ActivationOffloads", "MegatronFlags", "config_from_megatron", "offload_activations", "switch_off"]
