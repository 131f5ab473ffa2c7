"""Op cards: each file holds one op of the engine, its equation and its plain torch definition.

`<op>_reference` runs on any device and in any dtype; it is the definition every faster version is compared with.
"""
