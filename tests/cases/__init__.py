"""What several tests start from: models, plans, families, methods, and rules of the tree."""
