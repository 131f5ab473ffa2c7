"""Draft trees: shapes, flattening and masks."""
