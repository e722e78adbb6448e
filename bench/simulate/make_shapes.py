"""`python -m bench.simulate.make_shapes`: writes bench/shapes/: what networks train, in forward order.

    NETWORK.json     {"source": ..., "parameters": [[name, shape], ...]}
    positions.json   {NETWORK: [positions of each parameter], ...}

`positions` of a parameter: how many times an example uses each of its elements, which is what its operation count
follows from: height times width of a convolution's output, tokens for a linear layer, 0 for biases and lookups. Needs
torchvision and transformers; Inception-v4 (Szegedy et al., arXiv 1602.07261) is written out here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

__all__ = ["SHAPES", "main"]

SHAPES = Path(__file__).resolve().parents[1] / "shapes"
TOKENS = 64  # sequence length of the published workloads
VOCABULARY = 30_528  # BERT's 30,522, rounded up to a multiple of 8
BERT_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}

Entry = tuple[str, tuple[int, ...], int]  # name, shape, positions


def main() -> None:
    import torchvision  # type: ignore[import-untyped]
    from transformers import BertConfig, BertForPreTraining  # type: ignore[import-not-found,unused-ignore]

    tables: dict[str, tuple[str, list[Entry]]] = {}
    for name in ("resnet50", "densenet201"):
        with torch.device("meta"):
            model = getattr(torchvision.models, name)()
        tables[name] = (
            f"named_parameters() of torchvision.models.{name}(), 1000 classes",
            _traced(model, torch.empty(1, 3, 224, 224, device="meta")),
        )
    tables["inception-v4"] = ("Inception-v4 of arXiv 1602.07261, 1000 classes", _inception_v4())
    for name, options in (("bert-base", {}), ("bert-large", BERT_LARGE)):
        with torch.device("meta"):
            config = BertConfig(vocab_size=VOCABULARY, **options)
            model = BertForPreTraining(config)
        source = f"parameters of transformers.BertForPreTraining, vocabulary {VOCABULARY}, in the order of their use"
        tables[name] = (source, _bert(model, config.hidden_size))
    for name, (source, entries) in tables.items():
        _write(SHAPES / f"{name}.json", source, entries)
        print(f"{name}: {len(entries)} tensors, {sum(math.prod(shape) for _, shape, _ in entries):,} parameters")
    lines = [f" {json.dumps(name)}: {json.dumps([e[2] for e in entries])}" for name, (_, entries) in tables.items()]
    (SHAPES / "positions.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _write(path: Path, source: str, entries: Sequence[Entry]) -> None:
    rows = ",\n".join("  " + json.dumps([name, list(shape)]) for name, shape, _ in entries)
    path.write_text(f'{{"source": {json.dumps(source)},\n "parameters": [\n{rows}\n]}}\n')


def _traced(model: nn.Module, example: torch.Tensor) -> list[Entry]:
    """Sees each module's output once."""
    positions: dict[str, int] = {}

    def watch(name: str, module: nn.Module) -> None:
        def note(_module: nn.Module, _inputs: object, output: torch.Tensor) -> None:
            positions[f"{name}.weight"] = math.prod(output.shape[2:])

        module.register_forward_hook(note)

    for name, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            watch(name, module)
    model(example)
    return [(name, tuple(p.shape), positions.get(name, 0)) for name, p in model.named_parameters()]


def _bert(model: nn.Module, hidden_size: int) -> list[Entry]:
    """The decoder shares its matrix with the word embedding: its operations stand at its own bias, which is used last
    but for the next-sentence head."""
    entries = []
    for name, p in model.named_parameters():
        positions = 0 if name.endswith("bias") or "_embeddings" in name else TOKENS
        if "pooler" in name or "seq_relationship" in name:
            positions = min(positions, 1)
        if name == "cls.predictions.bias":
            positions = TOKENS * hidden_size
        entries.append((name, tuple(p.shape), positions))
    decoder = next(entry for entry in entries if entry[0] == "cls.predictions.bias")
    entries.remove(decoder)
    entries.insert(len(entries) - 2, decoder)
    return entries


Conv = tuple[str, int, int, int, int, int]  # name, in, out, kernel height, kernel width, side of the output


def _inception_v4() -> list[Entry]:
    convs: list[Conv] = [
        ("features.0", 3, 32, 3, 3, 149),
        ("features.1", 32, 32, 3, 3, 147),
        ("features.2", 32, 64, 3, 3, 147),
        ("features.3.conv", 64, 96, 3, 3, 73),
        *_chain("features.4.branch0", 160, 73, "64:1x1 96:3x3/71"),
        *_chain("features.4.branch1", 160, 73, "64:1x1 64:1x7 64:7x1 96:3x3/71"),
        ("features.5.conv", 192, 192, 3, 3, 35),
    ]
    for i in range(6, 10):
        convs += _chain(f"features.{i}.branch0", 384, 35, "96:1x1")
        convs += _chain(f"features.{i}.branch1", 384, 35, "64:1x1 96:3x3")
        convs += _chain(f"features.{i}.branch2", 384, 35, "64:1x1 96:3x3 96:3x3")
        convs += _chain(f"features.{i}.branch3", 384, 35, "96:1x1")
    convs += _chain("features.10.branch0", 384, 35, "384:3x3/17")
    convs += _chain("features.10.branch1", 384, 35, "192:1x1 224:3x3 256:3x3/17")
    for i in range(11, 18):
        convs += _chain(f"features.{i}.branch0", 1024, 17, "384:1x1")
        convs += _chain(f"features.{i}.branch1", 1024, 17, "192:1x1 224:1x7 256:7x1")
        convs += _chain(f"features.{i}.branch2", 1024, 17, "192:1x1 192:7x1 224:1x7 224:7x1 256:1x7")
        convs += _chain(f"features.{i}.branch3", 1024, 17, "128:1x1")
    convs += _chain("features.18.branch0", 1024, 17, "192:1x1 192:3x3/8")
    convs += _chain("features.18.branch1", 1024, 17, "256:1x1 256:1x7 320:7x1 320:3x3/8")
    for i in range(19, 22):
        convs += _chain(f"features.{i}.branch0", 1536, 8, "256:1x1")
        convs += _chain(f"features.{i}.branch1_0", 1536, 8, "384:1x1")
        convs += _chain(f"features.{i}.branch1_1a", 384, 8, "256:1x3")
        convs += _chain(f"features.{i}.branch1_1b", 384, 8, "256:3x1")
        convs += _chain(f"features.{i}.branch2", 1536, 8, "384:1x1 448:3x1 512:1x3")
        convs += _chain(f"features.{i}.branch2_3a", 512, 8, "256:1x3")
        convs += _chain(f"features.{i}.branch2_3b", 512, 8, "256:3x1")
        convs += _chain(f"features.{i}.branch3", 1536, 8, "256:1x1")
    entries: list[Entry] = []
    for name, num_in, num_out, height, width, side in convs:
        entries.append((f"{name}.conv.weight", (num_out, num_in, height, width), side * side))
        entries.append((f"{name}.bn.weight", (num_out,), side * side))
        entries.append((f"{name}.bn.bias", (num_out,), 0))
    entries += [("last_linear.weight", (1000, 1536), 1), ("last_linear.bias", (1000,), 0)]
    return entries


def _chain(name: str, num_in: int, side: int, text: str) -> list[Conv]:
    """ "64:1x1 96:3x3/71": 64 channels by a 1x1 kernel, then 96 by 3x3 with an output of 71 by 71."""
    convs: list[Conv] = []
    for i, part in enumerate(text.split()):
        channels, _, rest = part.partition(":")
        kernel, _, out_side = rest.partition("/")
        height, width = (int(n) for n in kernel.split("x"))
        side = int(out_side or side)
        convs.append((f"{name}.{i}", num_in, int(channels), height, width, side))
        num_in = int(channels)
    return convs


if __name__ == "__main__":
    main()
