"""The mathematics of target and draft, stage by stage."""
