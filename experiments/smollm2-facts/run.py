"""Facts that models answer right in a chat: the capitals of forty countries, greedily.

    python experiments/smollm2-facts/run.py dense=smollm2 NAME=CHECKPOINT ...

An answer is right if the name of the capital is in it, without regard to case and accents. Answers
are also compared with the first model's: a question that it misses says nothing about pruning.
facts.json beside this file has every answer; a model that is there is not asked again.
"""

import json
import shlex
import sys
import unicodedata
from pathlib import Path
from typing import Any

import torch

from rap.checkpoint.files import write_json
from rap.checkpoint.load import load, load_tokenizer
from rap.checkpoint.provenance import provenance
from rap.checkpoint.source import resolve_source

RESULT = Path(__file__).with_name("facts.json")
QUESTION = "What is the capital of {}?"
NEW_TOKENS = 24
CAPITALS = {
    "Argentina": "Buenos Aires",
    "Australia": "Canberra",
    "Austria": "Vienna",
    "Belgium": "Brussels",
    "Brazil": "Brasilia",
    "Canada": "Ottawa",
    "Chile": "Santiago",
    "China": "Beijing",
    "Colombia": "Bogota",
    "Cuba": "Havana",
    "Denmark": "Copenhagen",
    "Egypt": "Cairo",
    "Ethiopia": "Addis Ababa",
    "Finland": "Helsinki",
    "France": "Paris",
    "Germany": "Berlin",
    "Greece": "Athens",
    "Hungary": "Budapest",
    "India": "Delhi",
    "Indonesia": "Jakarta",
    "Iran": "Tehran",
    "Iraq": "Baghdad",
    "Ireland": "Dublin",
    "Italy": "Rome",
    "Japan": "Tokyo",
    "Kenya": "Nairobi",
    "Morocco": "Rabat",
    "Nepal": "Kathmandu",
    "Norway": "Oslo",
    "Peru": "Lima",
    "Poland": "Warsaw",
    "Portugal": "Lisbon",
    "Russia": "Moscow",
    "South Korea": "Seoul",
    "Spain": "Madrid",
    "Sweden": "Stockholm",
    "Thailand": "Bangkok",
    "Turkey": "Ankara",
    "Ukraine": "Kyiv",
    "United Kingdom": "London",
}


def plain(text: str) -> str:
    """Text in lower case, without accents."""
    letters = unicodedata.normalize("NFKD", text.casefold())
    return "".join(letter for letter in letters if not unicodedata.combining(letter))


@torch.inference_mode()
def answers(checkpoint: str) -> dict[str, str]:
    """What a model answers to the question about each country."""
    source = resolve_source(checkpoint)
    model, tokenizer = load(source, dtype="float32"), load_tokenizer(source)
    found = {}
    for country in CAPITALS:
        asked = [{"role": "user", "content": QUESTION.format(country)}]
        inputs = tokenizer.apply_chat_template(
            asked, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        new = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        new = new[0][inputs["input_ids"].shape[1] :]
        found[country] = tokenizer.decode(new, skip_special_tokens=True)
    return found


def row(name: str, found: dict[str, str], first: dict[str, str]) -> dict[str, Any]:
    """How many answers of a model are right, of all and of those that the first model has right."""
    right = {c for c, capital in CAPITALS.items() if plain(capital) in plain(found[c])}
    known = {c for c, capital in CAPITALS.items() if plain(capital) in plain(first[c])}
    return {"name": name, "right": len(right), "kept": len(right & known), "known": len(known)}


def table(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows as `rap report` shows them."""
    return {
        "title": "Facts that models answer in a chat",
        "note": f"Capitals of {len(CAPITALS)} countries, answered greedily in {NEW_TOKENS} tokens.",
        "header": ["model", "right", "right, of those the first model has right"],
        "rows": [[row["name"], row["right"], f"{row['kept']} of {row['known']}"] for row in rows],
    }


def main() -> None:
    """Ask every model that is named, in turn, and write what is known after each."""
    named = [one.rpartition("=") for one in sys.argv[1:]]
    kept = json.loads(RESULT.read_text("utf-8"))["answers"] if RESULT.is_file() else {}
    command = "python experiments/smollm2-facts/run.py " + shlex.join(sys.argv[1:])
    for name, _, checkpoint in named:
        if name not in kept:
            kept[name] = answers(checkpoint)
        first = kept[named[0][0]]
        rows = [row(one, kept[one], first) for one, _, _ in named if one in kept]
        about = {"answers": kept, "table": table(rows), "command": command}
        write_json(RESULT, about | {"provenance": provenance()})
        print(rows[-1], flush=True)


if __name__ == "__main__":
    main()
