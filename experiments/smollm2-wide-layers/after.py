"""Loss of the answers of eight needles in 4,096 tokens, of recovered models (bfloat16).

    python experiments/smollm2-wide-layers/after.py MODEL ... --text wikitext2-test.txt

after.json in this folder has a row a model.
"""

import argparse
import shlex
import sys
from pathlib import Path

from rap.checkpoint.files import write_json
from rap.checkpoint.load import load, load_tokenizer
from rap.checkpoint.provenance import provenance
from rap.checkpoint.source import resolve_source
from rap.data.text import read_text

sys.path.insert(0, str(Path(__file__).parents[1]))
from needles import needles, score

RESULT = Path(__file__).with_name("after.json")


def main() -> None:
    """Measure every model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--text", required=True)
    asked = parser.parse_args()
    tokenizer = load_tokenizer(resolve_source("smollm2"))
    _, documents = needles(tokenizer, read_text(asked.text))
    rows = {}
    for name in asked.models:
        rows[name] = score(load(name, dtype="bfloat16"), documents)
        print(name, rows[name], flush=True)
    table = {
        "title": "One needle in 4,096 tokens, after recovery",
        "header": ["model", "loss of the answer, nats/token", "right"],
        "rows": [[n, f"{row['loss']:.2f}", f"{row['right']:.0%}"] for n, row in rows.items()],
    }
    command = "python experiments/smollm2-wide-layers/after.py " + shlex.join(sys.argv[1:])
    made = {"rows": rows, "table": table, "command": command, "provenance": provenance()}
    write_json(RESULT, made)


if __name__ == "__main__":
    main()
