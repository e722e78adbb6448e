"""Compiles every kernel ahead of time, without a GPU, and reports what the compiler made of it.

`python -m dear_kernels.aot` prints one line per kernel, dtype and architecture: the widest global load and store, how
many 128-bit ones there are of how many a full block needs, the registers per thread, bytes of stack and local memory
(both must be 0: anything else is a spill). It exits with 1 if a line breaks its limits. `--arch 90` and `--kernel pack`
narrow the run.

What this ring cannot see: whether the kernel is right (the interpreter tests do) and how fast it is (only a GPU can).
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dear_kernels import adam, norm, pack, rank_sum, sgd, unpack
from dear_kernels.segments import compute_dtype

__all__ = ["ARCHS", "MAX_REGISTERS", "Case", "Report", "cases", "compile_case", "main"]

ARCHS = (80, 90, 100)

# Registers per thread. With 4 or 8 warps per program 128 leave 16 warps on an SM, enough to keep memory busy.
MAX_REGISTERS = 128

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
_TRITON = pack.TRITON_DTYPES


@dataclass(frozen=True, slots=True)
class Case:
    """One specialisation of a kernel. `signature` and `constants` are Triton's; pointers are 16-byte aligned."""

    kernel: Any
    label: str
    signature: dict[str, str]
    constants: dict[str, Any]
    num_warps: int
    loads: tuple[str, ...] = ()  # dtypes of the streams that a full block reads
    stores: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return str(self.kernel.__name__).strip("_").removesuffix("_kernel")

    @property
    def num_vector_loads(self) -> int:
        """128-bit loads per thread that bring in a full block; a short block must not add any of its own."""
        return sum(map(self._num_accesses, self.loads))

    @property
    def num_vector_stores(self) -> int:
        return sum(map(self._num_accesses, self.stores))

    def _num_accesses(self, dtype: str) -> int:
        return int(self.constants["BLOCK"]) * _BYTES[dtype] // (16 * 32 * self.num_warps)


@dataclass(frozen=True, slots=True)
class Report:
    """What one case compiled to for one architecture. Widths are of the widest global access, in bits."""

    case: Case
    arch: int
    load_bits: int
    store_bits: int
    num_vector_loads: int
    num_vector_stores: int
    registers: int
    stack_bytes: int
    local_bytes: int
    ptx: str = field(repr=False)
    ttir: str = field(repr=False)

    def faults(self) -> list[str]:
        """What breaks the limits, in words; empty if nothing does."""
        found = []
        if self.num_vector_loads != self.case.num_vector_loads:
            found.append(f"{self.num_vector_loads} 128-bit loads, expected {self.case.num_vector_loads}")
        if self.num_vector_stores != self.case.num_vector_stores:
            found.append(f"{self.num_vector_stores} 128-bit stores, expected {self.case.num_vector_stores}")
        if self.registers > MAX_REGISTERS:
            found.append(f"{self.registers} registers, limit {MAX_REGISTERS}")
        if self.stack_bytes or self.local_bytes:
            found.append(f"{self.stack_bytes} bytes of stack, {self.local_bytes} of local memory, expected none")
        return found


def cases() -> list[Case]:
    """Every kernel in the specialisations that training uses."""
    return [*_copy_cases(), *_sgd_cases(), *_adam_cases(), *_norm_cases(), *_sum_rows_cases()]


def _copy_cases() -> Iterator[Case]:
    fp32, bf16, fp16, fp64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
    for source, target in ((fp32, fp32), (fp32, bf16), (bf16, bf16), (bf16, fp32), (fp16, fp16), (fp64, fp64)):
        for scaled, strided in ((False, False), (True, True)):
            for module, kernel, flat, tensors, constant in (
                (pack, pack._pack_kernel, target, source, "SOURCE"),
                (unpack, unpack._unpack_kernel, source, target, "TARGET"),
            ):
                yield Case(
                    kernel,
                    f"{_NAMES[source]} to {_NAMES[target]}" + (" scaled strided" if strided else ""),
                    {
                        "flat_ptr": f"*{_NAMES[flat]}",
                        "address_ptr": "*i64",
                        "layout_ptr": "*i64",
                        "tile_ptr": "*i64",
                        "num_tiles": "i32",
                        "layout_columns": "i32",
                        "scale": "fp64",
                    },
                    {
                        constant: _TRITON[tensors],
                        "COMPUTE": _TRITON[compute_dtype(source, target)],
                        "SCALED": scaled,
                        "STRIDED": strided,
                        "BLOCK": module.BLOCK_NUMEL,
                        "EDGE": module.EDGE_NUMEL,
                    },
                    module.NUM_WARPS,
                    (_NAMES[source],),
                    (_NAMES[target],),
                )


def _coefficient_case(module: Any, kernel: Any) -> Case:
    signature = {
        "coefficient_ptr": "*fp64",
        "hyper_ptr": "*fp64",
        "group_ptr": "*i32",
        "steps_ptr": "*fp32",
        "used_ptr": "*fp32",
        "num_segments": "i32",
    }
    constants = {"HAS_USED": True, "BLOCK": module.SEGMENTS_PER_PROGRAM}
    return Case(kernel, "used fp32", signature, constants, module.COEFFICIENT_WARPS)


def _step_constants(module: Any, streams: Sequence[str | None], **flags: bool) -> dict[str, Any]:
    """`streams`: dtypes of parameter, gradient and copy."""
    align = 16 // min(_BYTES[dtype] for dtype in streams if dtype is not None)
    compute = _compute(streams[0] or "")
    return {**flags, "COMPUTE": compute, "BLOCK": module.BLOCK_NUMEL, "EDGE": module.EDGE_NUMEL, "ALIGN": align}


def _sgd_cases() -> Iterator[Case]:
    yield _coefficient_case(sgd, sgd._sgd_coefficients_kernel)
    for param, grad, low, momentum in (
        ("fp32", "fp32", None, False),
        ("fp32", "fp32", None, True),
        ("fp32", "fp32", "bf16", True),
        ("fp32", "bf16", "bf16", True),
        ("bf16", "bf16", None, True),
        ("fp64", "fp64", None, True),
    ):
        signature = {
            "param_ptr": f"*{param}",
            "grad_ptr": f"*{grad}",
            "buffer_ptr": f"*{param}",
            "low_ptr": f"*{low or param}",
            "coefficient_ptr": "*fp64",
            "tile_ptr": "*i64",
            "num_tiles": "i32",
        }
        constants = _step_constants(sgd, (param, grad, low), HAS_MOMENTUM=momentum, HAS_LOW=low is not None)
        label = f"{param}, grad {grad}" + (f", copy {low}" if low else "") + (" momentum" if momentum else "")
        states = (param,) * momentum
        copies = () if low is None else (low,)
        loads, stores = (param, grad, *states), (param, *states, *copies)
        yield Case(sgd._sgd_kernel, label, signature, constants, sgd.NUM_WARPS, loads, stores)


def _adam_cases() -> Iterator[Case]:
    yield _coefficient_case(adam, adam._adam_coefficients_kernel)
    for param, grad, low, amsgrad in (
        ("fp32", "fp32", None, False),
        ("fp32", "fp32", None, True),
        ("fp32", "fp32", "bf16", False),
        ("fp32", "bf16", "bf16", True),
        ("bf16", "bf16", None, False),
        ("fp64", "fp64", None, True),
    ):
        signature = {
            "param_ptr": f"*{param}",
            "grad_ptr": f"*{grad}",
            "exp_avg_ptr": f"*{param}",
            "exp_avg_sq_ptr": f"*{param}",
            "max_ptr": f"*{param}",
            "low_ptr": f"*{low or param}",
            "coefficient_ptr": "*fp64",
            "tile_ptr": "*i64",
            "num_tiles": "i32",
        }
        constants = _step_constants(adam, (param, grad, low), HAS_MAX=amsgrad, HAS_LOW=low is not None)
        label = f"{param}, grad {grad}" + (f", copy {low}" if low else "") + (" amsgrad" if amsgrad else "")
        states = (param,) * (3 if amsgrad else 2)
        copies = () if low is None else (low,)
        loads, stores = (param, grad, *states), (param, *states, *copies)
        yield Case(adam._adam_kernel, label, signature, constants, adam.NUM_WARPS, loads, stores)


def _compute(param: str) -> Any:
    return tl.float64 if param == "fp64" else tl.float32


def _norm_cases() -> Iterator[Case]:
    for dtype in ("fp32", "bf16", "fp64"):
        constants = {"COUNT": dtype == "fp64", "PARTIALS": norm.MAX_PROGRAMS, "BLOCK": norm.BLOCK_NUMEL}
        signature = {"shard_ptr": f"*{dtype}", "partial_ptr": "*fp64", "numel": "i64"}
        yield Case(norm._norm_kernel, dtype, signature, constants, norm.NUM_WARPS, (dtype,))
    constants = {"COUNT": True, "PARTIALS": norm.MAX_PROGRAMS}
    signature = {"out_ptr": "*fp64", "partial_ptr": "*fp64", "num_partials": "i32"}
    yield Case(norm._norm_finish_kernel, "fp64", signature, constants, norm.NUM_WARPS)


def _sum_rows_cases() -> Iterator[Case]:
    for row, output in (("fp32", "fp32"), ("bf16", "fp32"), ("fp64", "fp64")):
        signature = {
            "output_ptr": f"*{output}",
            "rows_ptr": f"*{row}",
            "numel": "i64",
            "num_rows": "i32",
            "divisor": "fp64",
        }
        constants = {"BLOCK": rank_sum.BLOCK_NUMEL}
        label = f"{row} to {output}"
        streams = (row, row), (output,)  # the first row, and the loop over the others
        yield Case(rank_sum._sum_rows_kernel, label, signature, constants, rank_sum.NUM_WARPS, *streams)


def compile_case(case: Case, arch: int) -> Report:
    """Compiles `case` for compute capability `arch` (90 for sm_90) and reads the result back."""
    names = case.kernel.arg_names
    signature = {name: case.signature.get(name, "constexpr") for name in names}
    attrs = {
        (position,): [["tt.divisibility", 16]] for position, name in enumerate(names) if signature[name].startswith("*")
    }
    source = ASTSource(case.kernel, signature=signature, constexprs=case.constants, attrs=attrs)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": case.num_warps})
    registers, stack_bytes, local_bytes = _resource_usage(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    loads, stores = access_bits(ptx, "ld"), access_bits(ptx, "st")
    return Report(
        case=case,
        arch=arch,
        load_bits=max(loads, default=0),
        store_bits=max(stores, default=0),
        num_vector_loads=loads.count(128),
        num_vector_stores=stores.count(128),
        registers=registers,
        stack_bytes=stack_bytes,
        local_bytes=local_bytes,
        ptx=ptx,
        ttir=compiled.asm["ttir"],
    )


def access_bits(ptx: str, operation: str) -> list[int]:
    """Widths of all global accesses in bits. `access_bits("ld.global.v4.b32 ...", "ld")` is [128]."""
    widths = re.findall(rf"\b{operation}\.global[\w.:]*?(?:\.v(\d+))?\.[bfus](\d+)\b", ptx)
    return [int(count or 1) * int(bits) for count, bits in widths]


def _resource_usage(cubin: bytes) -> tuple[int, int, int]:
    """(registers, stack bytes, local bytes), from the cuobjdump inside the Triton wheel."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+)\s+STACK:(\d+)\s+SHARED:\d+\s+LOCAL:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cannot read the output of {tool}: {text!r}")
    return int(found[1]), int(found[2]), int(found[3])


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; returns 1 if a case breaks its limits."""
    parser = argparse.ArgumentParser(prog="python -m dear_kernels.aot", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--arch", type=int, action="append", help="compute capability such as 90; default 80, 90 and 100"
    )
    parser.add_argument("--kernel", help="only kernels whose name contains this")
    options = parser.parse_args(argv)
    print(f"triton {triton.__version__}, torch {torch.__version__}, limit {MAX_REGISTERS} registers")
    widths = (18, 40, 7, 9, 10, 12, 13, 9, 11, 11)
    heads = "kernel dtypes arch load_bits store_bits vector_loads vector_stores registers stack_bytes local_bytes"
    print(*(head.ljust(width) for head, width in zip(heads.split(), widths, strict=True)))
    has_faults = False
    for case in cases():
        if options.kernel and options.kernel not in case.name:
            continue
        for arch in options.arch or ARCHS:
            report = compile_case(case, arch)
            faults = "; ".join(report.faults())
            has_faults |= bool(faults)
            cells = (
                case.name,
                case.label,
                f"sm_{arch}",
                report.load_bits,
                report.store_bits,
                f"{report.num_vector_loads}/{case.num_vector_loads}",
                f"{report.num_vector_stores}/{case.num_vector_stores}",
                report.registers,
                report.stack_bytes,
                report.local_bytes,
            )
            print(*(str(cell).ljust(width) for cell, width in zip(cells, widths, strict=True)), faults, flush=True)
    return int(has_faults)


if __name__ == "__main__":
    sys.exit(main())
