"""Which files belong to the observers of a worker, and when they count as changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from percolator.services.local.launcher import Sources


def write(path: Path, text: str) -> None:
    """A file that is newer than before: two writes may fall into one tick of the file system."""
    before = path.stat().st_mtime_ns if path.exists() else 0
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, ns=(before + 10**9, before + 10**9))


def names(paths: list[Path], here: Path) -> list[str]:
    return [str(path.relative_to(here)) for path in paths]


def test_a_module_and_what_it_imports_from_beside_it(tmp_path: Path) -> None:
    write(tmp_path / "shop.py", "import orders\nfrom percolator import Table\n")
    write(tmp_path / "orders.py", "def f():\n    from money.euro import rate\n")
    write(tmp_path / "money" / "__init__.py", "")
    write(tmp_path / "money" / "euro.py", "rate = 1\n")
    write(tmp_path / "program.py", "import shop\n")
    sources = Sources(["shop:observers"], tmp_path)
    assert sources.changed() == []
    for name in ("shop.py", "orders.py", "money/euro.py"):
        write(tmp_path / name, (tmp_path / name).read_text() + "# changed\n")
        assert names(sources.changed(), tmp_path) == [name]
    assert sources.changed() == []
    write(tmp_path / "program.py", "import shop  # changed\n")
    assert sources.changed() == []


def test_a_package_with_everything_in_it(tmp_path: Path) -> None:
    write(tmp_path / "shop" / "index.py", "")
    sources = Sources(["shop.index:observers"], tmp_path)
    write(tmp_path / "shop" / "deep" / "new.py", "")
    assert names(sources.changed(), tmp_path) == ["shop/deep/new.py"]
    (tmp_path / "shop" / "index.py").unlink()
    assert names(sources.changed(), tmp_path) == ["shop/index.py"]


def test_a_module_that_is_not_there_yet_and_one_that_is_broken(tmp_path: Path) -> None:
    sources = Sources(["shop:observers"], tmp_path)
    write(tmp_path / "shop.py", "def (:\n")
    assert names(sources.changed(), tmp_path) == ["shop.py"]
    write(tmp_path / "orders.py", "")
    write(tmp_path / "shop.py", "import orders\n")
    assert names(sources.changed(), tmp_path) == ["orders.py", "shop.py"]


def test_while_a_module_is_broken_only_what_really_changes_is_named(tmp_path: Path) -> None:
    """What it imported is not removed, and a change there is noticed as before."""
    write(tmp_path / "orders.py", "")
    write(tmp_path / "shop.py", "import orders\n")
    sources = Sources(["shop:observers"], tmp_path)
    write(tmp_path / "shop.py", "import orders\ndef (:\n")
    assert names(sources.changed(), tmp_path) == ["shop.py"]
    write(tmp_path / "orders.py", "changed = True\n")
    assert names(sources.changed(), tmp_path) == ["orders.py"]
    write(tmp_path / "shop.py", "import orders, os\n")
    assert names(sources.changed(), tmp_path) == ["shop.py"]


def test_two_modules_that_import_each_other(tmp_path: Path) -> None:
    write(tmp_path / "shop.py", "import orders\n")
    write(tmp_path / "orders.py", "import shop\n")
    sources = Sources(["shop:observers", "orders:observers"], tmp_path)
    write(tmp_path / "orders.py", "import shop, os\n")
    assert names(sources.changed(), tmp_path) == ["orders.py"]


def test_a_module_is_also_found_where_python_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    write(elsewhere / "shop.py", "")
    monkeypatch.syspath_prepend(str(elsewhere))
    sources = Sources(["shop:observers"], tmp_path / "here")
    write(elsewhere / "shop.py", "changed = True\n")
    assert names(sources.changed(), elsewhere) == ["shop.py"]
