# SPDX-License-Identifier: Apache-2.0
"""What does it cost to begin with the weights of a transformers folder, and to export one, and are the bits the same?

    python -m benchmarks.huggingface                 every case, about a minute on one H200
    python -m benchmarks.huggingface load            these cases, and those they need
    python -m benchmarks.huggingface --size small    a few seconds on any machine: does every case run?

First a folder is made, in shards of 1 GB: a Llama of 1.24B bf16 parameters with random weights and a tied head (the
shape of Llama 3.2 1B). `load` builds the trainer's model from it, with the files in the page cache; `from_pretrained`
is the package's own way to the same device, for comparison. `host_growth_gib` is by how much the process's own memory
grew at most, `peak_gib` the device's; both beside `model_gib`. On the device there must be nothing but the model, and
on the host no more than a few blocks.

`train` makes three steps with `offstage train`'s own loop, its state on the host, and saves. `export` writes the run's
weights to a folder, `from_pretrained` loads that, and the logits must have the bits of those that the trained model had
before it was saved. Needs the package transformers. Folders go to $OFFSTAGE_SCRATCH, or to the system's folder for
temporary files.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from benchmarks.checkpoints import SCRATCH, Growth, rate, timed
from benchmarks.common import DEVICE, ON_GPU, Row, clean_up, gib, peak_bytes, reset_peak, synchronize
from benchmarks.harness import Case, at_least, at_most
from offstage.train.config import ModelSettings, load_config
from offstage.train.export import export
from offstage.train.loop import Training
from offstage.train.model import build
from offstage.train.parallel import started
from offstage.train.progress import progress_for
from offstage.train.run_folder import RunFolder
from offstage.train.signals import StopRequests

DTYPE = torch.bfloat16
SHAPES: dict[str, dict[str, Any]] = {
    "full": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "small": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
SEQUENCE = {"full": 512, "small": 32}
MAX_PEAK = 1.02
"""Device memory while weights are loaded, over the model's."""
MAX_GROWTH = 0.25
"""Host memory that loading and exporting take, in GiB, beside a model that is on the host itself."""


class Bench:
    """The folders, and what one case leaves for another."""

    def __init__(self, size: str, scratch: Path) -> None:
        import transformers

        self.package, self.size = transformers, size
        self.source, self.run, self.exported = scratch / "source", scratch / "run", scratch / "exported"
        tokens = torch.randint(
            SHAPES[size]["vocab_size"], (1, SEQUENCE[size]), generator=torch.Generator().manual_seed(1)
        )
        self.tokens = tokens.to(DEVICE)
        self.model_bytes = 0
        self.parameters = 0
        self.logits: torch.Tensor | None = None
        self._make_source()

    def _make_source(self) -> None:
        config = self.package.LlamaConfig(**SHAPES[self.size], tie_word_embeddings=True, max_position_embeddings=2048)
        torch.manual_seed(0)
        with torch.device(DEVICE):
            lm = self.package.AutoModelForCausalLM.from_config(config, dtype=DTYPE)
        tensors = [*lm.parameters(), *lm.buffers()]
        self.model_bytes = sum(one.numel() * one.element_size() for one in tensors)
        self.parameters = sum(one.numel() for one in lm.parameters())
        lm.save_pretrained(self.source, max_shard_size="1GB" if self.size == "full" else "50KB")

    def about(self) -> Row:
        return {
            "size": self.size,
            "params": self.parameters,
            "dtype": str(DTYPE),
            "model_gib": gib(self.model_bytes),
            "files": len(list(self.source.glob("*.safetensors"))),
            "transformers": self.package.__version__,
        }

    # Loading #

    def load(self) -> Row:
        settings = ModelSettings(weights=str(self.source))
        row, model = self._loaded(lambda: build(settings, device=DEVICE, dtype=DTYPE, sequence=SEQUENCE[self.size]))
        with torch.no_grad():
            found = model.eval().logits(self.tokens).clone()
        del model
        same = torch.equal(found, self._logits_of(self.source))
        row["must"] = {"same_logits": at_least(1, int(same))}
        if ON_GPU:
            peak = at_most(MAX_PEAK, round(row["peak_gib"] / gib(self.model_bytes), 4))
            row["must"] |= {"peak_over_model": peak, "host_growth_gib": at_most(MAX_GROWTH, row["host_growth_gib"])}
        return row

    def from_pretrained(self) -> Row:
        row, _ = self._loaded(lambda: self._package_model(self.source))
        return row

    def _package_model(self, folder: Path) -> Any:
        return self.package.AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPE).to(DEVICE).eval()

    def _logits_of(self, folder: Path) -> torch.Tensor:
        with torch.no_grad():
            return self._package_model(folder)(input_ids=self.tokens, use_cache=False).logits  # type: ignore[no-any-return]

    def _loaded(self, load: Callable[[], Any]) -> tuple[Row, Any]:
        clean_up()
        reset_peak()
        with Growth() as growth:
            synchronize()
            start = time.perf_counter()
            model = load()
            synchronize()
            seconds = time.perf_counter() - start
        row = {"seconds": round(seconds, 3), "gb_per_s": rate(self.model_bytes, seconds)}
        return row | {"peak_gib": gib(peak_bytes()), "host_growth_gib": gib(growth.num_bytes or 0)}, model

    # Training and exporting #

    def train(self) -> Row:
        flags = [
            *("--model.weights", str(self.source), "--model.dtype", "bfloat16", "--run.folder", str(self.run)),
            *("--data.sequence", str(SEQUENCE[self.size]), "--data.batch", "2", "--run.steps", "3"),
            *("--run.eval-every", "0", "--run.save-every", "0", "--run.observe-step", "0", "--run.progress", "quiet"),
            *("--optimizer.lr", "1e-4", "--optimizer.warm-up", "0"),
        ]
        config, folder = load_config(None, flags), RunFolder(self.run)
        clean_up()
        start = time.perf_counter()
        with started(config.parallel, config.run.torch_device()) as parallel, folder.locked():
            training = Training(config, parallel, folder, progress_for("quiet", first=True))
            ready_s = time.perf_counter() - start
            try:
                result = training.run(StopRequests(parallel.host_group))
                training.optimizer.synchronize()
                with training.passes.evaluating():
                    self.logits = training.passes.logits(self.tokens).clone()
            finally:
                training.close()
        return {"ready_s": round(ready_s, 3), "seconds": round(time.perf_counter() - start, 3), "loss": result.loss}

    def export(self) -> Row:
        assert self.logits is not None
        clean_up()
        with Growth() as growth:
            seconds = timed(lambda: export(self.run, self.exported, shard_bytes=2**30))
        found = self._logits_of(self.exported)
        growth_gib = gib(growth.num_bytes or 0)
        return {
            "seconds": round(seconds, 3),
            "gb_per_s": rate(self.model_bytes, seconds),
            "host_growth_gib": growth_gib,
            "written_files": len(list(self.exported.glob("*.safetensors"))),
            "trained": not torch.equal(found, self._logits_of(self.source)),
            "must": {
                "same_logits": at_least(1, int(torch.equal(found, self.logits))),
                "host_growth_gib": at_most(MAX_GROWTH, growth_gib),
            },
        }


CASES: dict[str, Callable[[Bench], Row]] = {
    "load": Bench.load,
    "from_pretrained": Bench.from_pretrained,
    "train": Bench.train,
    "export": Bench.export,
}


def main() -> None:
    options = harness.parse(harness.command(__doc__), harness.cases_of(CASES, needs={"export": ["train"]}))
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="offstage-", dir=os.environ.get(SCRATCH)) as scratch:
        bench = Bench(options.size, Path(scratch))

        def measure(case: Case) -> Row:
            row = {"case": case.name, **bench.about(), **CASES[case.name](bench)}
            failed.extend([] if harness.is_met(row) else [case.name])
            return row

        harness.run("huggingface", options.cases, measure, failed=failed)


if __name__ == "__main__":
    main()
