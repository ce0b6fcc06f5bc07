from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rank_pool import RankPool


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden-dir",
        default=str(Path(__file__).parent / "golden"),
        help="directory of golden values (*.json) that tests/test_golden.py checks",
    )


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()
