"""The lab: measures, compares, remembers and shows what `eagle3core` does. Importing it imports nothing heavy."""
