"""Every kernel compiled ahead of time for sm_80, sm_90 and sm_100: 128-bit accesses, no spills, 64-bit offsets."""

import re
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from dear_kernels import aot

CASES = aot.cases()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("arch", aot.ARCHS, ids="sm_{}".format)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name} {case.label}")
def test_kernel_compiles_within_its_limits(case, arch):
    report = aot.compile_case(case, arch)
    print(f"{case.name} {case.label} sm_{arch}: {report.registers} registers")
    assert report.faults() == []
    assert not re.search(r"\.local\b", report.ptx)
    if arch == aot.ARCHS[0]:
        assert narrow_offsets(report.ttir) == []


def narrow_offsets(ttir):
    """Pointer additions with a 32-bit offset that could grow: neither a constant nor an index inside a block."""
    harmless = set(re.findall(r"(%\S+) = (?:tt\.make_range|arith\.constant)", ttir))
    found = []
    for line in ttir.splitlines():
        match = re.search(r"tt\.addptr %\S+, (%[\w#]+)\b.*, (?:tensor<\d+x)?i32\W", line)
        if match and match[1] not in harmless:
            found.append(line.strip())
    return found


def test_access_bits_reads_ptx():
    ptx = "ld.global.v4.b32 {a};\n@p ld.global.b16 {b};\nst.global.v2.b64 [x];\nld.shared.v4.b32 {c};"
    assert aot.access_bits(ptx, "ld") == [128, 16]
    assert aot.access_bits(ptx, "st") == [128]


def test_the_command_prints_a_table(capsys):
    assert aot.main(["--kernel", "norm_finish", "--arch", "90"]) == 0
    out = capsys.readouterr().out
    assert "registers" in out and re.search(r"norm_finish +fp64 +sm_90", out)


def test_the_stored_table_has_every_case():
    """docs/kernels.md: what the command prints, kept with the command."""
    stored = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text()
    assert "python -m dear_kernels.aot" in stored
    for case in CASES:
        for arch in aot.ARCHS:
            row = rf"^{case.name} +{re.escape(case.label)} +sm_{arch} +\d+"
            assert re.search(row, stored, re.MULTILINE), (
                f"{case.name} {case.label} sm_{arch} is missing: run the command"
            )
