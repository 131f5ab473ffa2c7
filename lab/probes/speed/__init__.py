"""What speculation brings at which acceptance, where a step's time goes, and which depth to choose at which batch.

`measure` makes the rows (`eagle3lab speed`), `rows` reads them, `curves` and `recommend` are arithmetic on what they
hold, `figures` and `waterfall` draw it (notebook 40_speed).
"""
