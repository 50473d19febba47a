"""Standard error, where everything goes that is no result."""

from rich.console import Console

# Plain text in, plain text out: messages name extras with brackets, and paths stay in one piece.
console = Console(stderr=True, markup=False, soft_wrap=True)
