"""The examples of docs/streams.md and docs/prompt-cache.md run as they are pasted."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from kvproof import fast
from kvproof.oracle.serving.audit import audit

DOCS = Path(__file__).parents[2] / "docs"


def examples(name):
    """The Python of a page, each example at its own lines."""
    text = (DOCS / name).read_text()
    for found in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield "\n" * (text[: found.start()].count("\n") + 1) + found.group(1)


def run(name, names):
    """Run a page's examples, one after the other; gives how many there are."""
    count = 0
    for source in examples(name):
        exec(compile(source, str(DOCS / name), "exec"), names)
        count += 1
    return count


@pytest.fixture(scope="module")
def names():
    """What stands in the names of docs/streams.md at its end."""
    found = {}
    assert run("streams.md", found) >= 7
    return found


def test_the_examples_of_streams(names):
    assert audit(names["pool"], [names["a"], names["b"]]) == []
    assert audit(names["pool_there"], []) == []
    assert all(np.isfinite(window.gated.astype(np.float32)).all() for window in names["outputs"])


def test_the_examples_of_the_prompt_cache(names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mine = {key: names[key] for key in ("pool", "weights", "projections")}
    mine["stream"] = first = fast.Stream(names["pool"], names["weights"])
    first.append(names["projections"](24))
    assert run("prompt-cache.md", mine) == 1
    assert mine["stream"] is not first
    assert mine["stream"].lengths == (20,) * names["geometry"].layers
    mine["stream"].close()
    first.close()


def test_an_example_that_does_not_run_is_red(tmp_path, monkeypatch):
    (tmp_path / "page.md").write_text("text\n\n```python\nx = 1\n```\n\n```python\nx = nothing\n```\n")
    monkeypatch.setattr(f"{__name__}.DOCS", tmp_path)
    with pytest.raises(NameError, match="nothing") as caught:
        run("page.md", {})
    assert caught.traceback[-1].lineno == 7
