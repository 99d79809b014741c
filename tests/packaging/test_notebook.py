"""The notebook in examples/ runs from its first cell to its last, and its curve rises."""

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="needs nbclient and ipykernel (the extra test)")
nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel (the extra test)")
pytest.importorskip("ipykernel", reason="needs nbclient and ipykernel (the extra test)")

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "first_steps.ipynb"


def test_it_holds_no_outputs():
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    assert [c.id for c in cells if c.cell_type == "code" and (c.outputs or c.execution_count is not None)] == []


def require_a_rise(printed: str) -> None:
    first, last = map(
        float, printed.splitlines()[-1].removeprefix("reward: ").replace(" at last", "").split(" at first, ")
    )
    assert first < 0.15
    assert last > 0.5


def test_its_code_runs(capsys, monkeypatch):
    """In this process, without what a notebook adds."""
    monkeypatch.setattr("matplotlib.pyplot.show", lambda: None)
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    exec(
        compile("\n".join(c.source for c in cells if c.cell_type == "code"), NOTEBOOK, "exec"), {"__name__": "notebook"}
    )
    require_a_rise(capsys.readouterr().out)


@pytest.mark.long
def test_it_runs(tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources=resources).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    printed = "".join(output.text for output in outputs if output.get("name") == "stdout")
    require_a_rise(printed)
    assert any("image/png" in output.get("data", {}) for output in outputs)
