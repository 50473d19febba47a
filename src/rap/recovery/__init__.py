"""Recovering quality after the cut: a closed-form refit first, then distillation."""
