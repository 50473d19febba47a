"""docs/measurements/recovery.md: its table of budgets is what the result files say."""

from cases.scripts import REPOSITORY, load_script

SCRIPT = load_script("docs/budgets.py")


def test_the_committed_table_is_built_from_the_committed_results(monkeypatch, tmp_path):
    """If it is not: python docs/budgets.py."""
    page = REPOSITORY / SCRIPT.PAGE
    before = page.read_text(encoding="utf-8")
    (tmp_path / SCRIPT.PAGE).parent.mkdir(parents=True)
    (tmp_path / SCRIPT.PAGE).write_text(before, encoding="utf-8")
    (tmp_path / "experiments").symlink_to(REPOSITORY / "experiments")
    monkeypatch.setattr(SCRIPT, "REPOSITORY", tmp_path)
    SCRIPT.main()
    assert (tmp_path / SCRIPT.PAGE).read_text(encoding="utf-8") == before


def test_a_ratio_that_was_not_measured_whole_is_left_out():
    def cell(method, retain, recover, perplexity):
        figures = {"perplexity": perplexity, "kl": {"value": 0.1}}
        return {"method": method, "retain": retain, "recover": recover, **figures}

    cells = [{"method": "dense", "retain": 1.0, "recover": "none", "perplexity": 10.0}]
    cells += [cell(name, 0.7, how, 11.0) for name in "ab" for how in ("none", "fit")]
    cells += [cell("a", 0.5, how, 12.0) for how in ("none", "fit")]
    assert SCRIPT.rows_of(cells, ("a", "b")) == [["0.7", *["1.100, 0.100"] * 4]]
