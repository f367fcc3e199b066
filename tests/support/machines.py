# SPDX-License-Identifier: Apache-2.0
"""Machines that are not here, and models in numbers, for tests of the planner."""

from __future__ import annotations

from hypothesis import strategies as st

from offstage.planning.machine import Machine

GIB = 1 << 30


def machine(**changes: object) -> Machine:
    """The reference machine (one NVIDIA H200, PCIe 5, 16 threads) with `changes`."""
    fields: dict[str, object] = {
        "device_name": "NVIDIA H200",
        "device_bytes": 139 * GIB,
        "device_free_bytes": 138 * GIB,
        "host_bytes": 126 * GIB,
        "host_free_bytes": 120 * GIB,
        "link_up_gb_per_s": 55.1,
        "link_down_gb_per_s": 55.1,
        "link_duplex_gb_per_s": 50.0,
        "dram_gb_per_s": 174.0,
        "host_update_gb_per_s": {1: 17.0, 4: 57.0, 8: 103.0, 16: 155.0},
        "host_update_gparam_limit": 0.6,
        "pin_gib_per_s": 17.0,
        "device_gb_per_s": 3560.0,
        "threads": 16,
    }
    return Machine(**{**fields, **changes})  # type: ignore[arg-type]


def desktop() -> Machine:
    """A 24 GiB card on PCIe 4 in a desktop with two channels of memory."""
    return machine(
        device_name="a 24 GiB card",
        device_bytes=24 * GIB,
        device_free_bytes=23 * GIB,
        host_bytes=128 * GIB,
        host_free_bytes=120 * GIB,
        link_up_gb_per_s=25.0,
        link_down_gb_per_s=25.0,
        link_duplex_gb_per_s=21.0,
        dram_gb_per_s=65.0,
        host_update_gb_per_s={1: 20.0, 4: 55.0, 8: 62.0, 16: 65.0},
        device_gb_per_s=900.0,
    )


def node() -> Machine:
    """One of 8 devices of 80 GiB, PCIe 5, two sockets with 128 threads."""
    return machine(
        device_name="80 GiB, 8 per host",
        device_bytes=80 * GIB,
        device_free_bytes=79 * GIB,
        host_bytes=2048 * GIB,
        host_free_bytes=1900 * GIB,
        dram_gb_per_s=480.0,
        host_update_gb_per_s={1: 14.0, 16: 190.0, 64: 420.0, 128: 450.0},
        device_gb_per_s=2700.0,
        threads=128,
        ranks_on_host=8,
        numa_nodes=2,
    )


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """PCIe 3, 4, 5 or a coherent link; 2 to 128 cores; 8 to 192 GiB devices; 8 GiB to 2 TiB hosts."""
    duplex = draw(st.sampled_from([11.0, 21.0, 50.0, 450.0]))
    cores = draw(st.sampled_from([2, 8, 16, 64, 128]))
    dram = draw(st.sampled_from([20.0, 60.0, 127.0, 480.0]))
    host = draw(st.sampled_from([8, 64, 512, 2048])) * GIB
    device = draw(st.sampled_from([8, 24, 80, 192])) * GIB
    return machine(
        device_bytes=device,
        device_free_bytes=device,
        host_bytes=host,
        host_free_bytes=host,
        link_up_gb_per_s=1.1 * duplex,
        link_down_gb_per_s=1.1 * duplex,
        link_duplex_gb_per_s=duplex,
        dram_gb_per_s=dram,
        host_update_gb_per_s={1: min(dram, 14.0), cores: min(dram, 14.0 * cores)},
        device_gb_per_s=draw(st.sampled_from([300.0, 900.0, 3560.0])),
        threads=cores,
        ranks_on_host=draw(st.sampled_from([1, 1, 8])),
    )


# Published models, in numbers


def dense(layers: int, width: int, hidden: int, key_value: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """A decoder with gated MLPs and untied embeddings, as in Llama."""
    block = {
        "attention.q": (width, width),
        "attention.k": (key_value, width),
        "attention.v": (key_value, width),
        "attention.o": (width, width),
        "mlp.gate": (hidden, width),
        "mlp.up": (hidden, width),
        "mlp.down": (width, hidden),
        "attention_norm": (width,),
        "mlp_norm": (width,),
    }
    sizes: dict[str, tuple[int, ...]] = {"embedding": (vocabulary, width)}
    sizes |= {f"layers.{i}.{name}": shape for i in range(layers) for name, shape in block.items()}
    return sizes | {"norm": (width,), "head": (vocabulary, width)}


def dense_7b() -> dict[str, tuple[int, ...]]:
    return dense(32, 4096, 11008, 4096, 32_000)


def dense_70b() -> dict[str, tuple[int, ...]]:
    return dense(80, 8192, 28672, 1024, 128_256)


def mixture_671b() -> dict[str, tuple[int, ...]]:
    """61 layers, the first 3 dense, 256 routed experts and a shared one, compressed attention, as in DeepSeek-V3."""
    width, heads, experts, hidden = 7168, 128, 256, 2048
    attention = {
        "attention.q_a": (1536, width),
        "attention.q_b": (heads * 192, 1536),
        "attention.kv_a": (576, width),
        "attention.kv_b": (heads * 256, 512),
        "attention.o": (width, heads * 128),
        "attention_norm": (width,),
        "mlp_norm": (width,),
    }
    mlp = {f"mlp.{name}": (18432, width) for name in ("gate", "up", "down")}
    mixture = {"mlp.router": (experts, width)}
    mixture |= {f"mlp.shared_experts.{name}": (hidden, width) for name in ("gate", "up", "down")}
    mixture |= {f"mlp.experts.{name}": (experts, hidden, width) for name in ("gate", "up", "down")}
    sizes: dict[str, tuple[int, ...]] = {"embedding": (129_280, width)}
    for i in range(61):
        sizes |= {f"layers.{i}.{name}": shape for name, shape in {**attention, **(mlp if i < 3 else mixture)}.items()}
    return sizes | {"norm": (width,), "head": (129_280, width)}
