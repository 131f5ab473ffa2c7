"""Why a draft head's acceptance is what it is: one lamp a known cause, each with what mending it would give.

`lamp` says what a lamp is and `case` what it may look at; `lamps` holds them by family, and `LAMPS` there is their one
table. A new cause is a value in one of its files.
"""
