from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
TOOL = ROOT / "tools" / "config_reference.py"


def run_tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(TOOL), *arguments], capture_output=True, text=True, timeout=60)


def test_the_reference_is_up_to_date() -> None:
    result = run_tool("--check")
    assert result.returncode == 0, result.stderr


def test_a_stale_reference_is_found_and_written_anew(tmp_path: Path) -> None:
    page = tmp_path / "config.md"
    page.write_text("old")
    result = run_tool("--check", "--output", str(page))
    assert result.returncode == 1
    assert "out of date" in result.stderr
    assert run_tool("--output", str(page)).returncode == 0
    assert run_tool("--check", "--output", str(page)).returncode == 0


def test_every_variable_that_the_code_reads_is_in_the_reference() -> None:
    sources = [p.read_text() for p in (ROOT / "megatron_grpo").rglob("*.py")]
    read = re.compile(
        r"""(?:environ(?:\.get)?|getenv)[\[(]"(\w+)\"|"(\w+)" in os\.environ|parent\.get\("(\w+)"""
    )
    names = {name for source in sources for match in read.findall(source) for name in match if name}
    assert {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES"} <= names
    page = (ROOT / "docs" / "config.md").read_text()
    assert not {name for name in names if f"`{name}`" not in page}
