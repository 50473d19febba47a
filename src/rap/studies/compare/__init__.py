"""Methods side by side: a grid of cells, each cut, recovered and measured in the same way."""
