"""Checkpoints that several experiments measure: kept pruned ones, and folders that users name.

A script one folder below imports it after `sys.path.insert(0, str(Path(__file__).parents[1]))`.
"""

import argparse
import functools
from pathlib import Path

from rap.calibration.dense_context import DenseContext
from rap.checkpoint.load import load
from rap.checkpoint.source import resolve_source
from rap.methods import Rap
from rap.model.fingerprint import fingerprint_model
from rap.pipeline import save


def cut(bench: DenseContext, retain: float, kept_in: Path) -> Path:
    """The pruned checkpoint of profile stock, or one that was kept there before."""
    method = Rap(retain=retain, profile="stock", align=16)
    # Named by weights, text and settings, so that another model does not get it.
    folder = kept_in / f"stock-{retain:g}-{bench.key(**method.describe())}"
    if not folder.is_dir():
        plan = bench.plan(method)
        save(method.apply(bench.model, plan), plan, folder, bench.tokenizer)
    return folder


@functools.cache
def weights_of(directory: Path) -> str:
    """The fingerprint of a checkpoint's weights: another fit changes it, and its name does not."""
    return fingerprint_model(load(resolve_source(directory), dtype="float32"))


def relative(text: str) -> Path:
    """A folder as results may name it; ArgumentTypeError for an absolute one."""
    path = Path(text)
    if path.is_absolute():
        raise argparse.ArgumentTypeError(f"{text} is one machine's: give it from this folder")
    return path
