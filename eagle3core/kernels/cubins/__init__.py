"""Machine code on disk: found by what it is made from, compiled where it is missing, side by side where much is.

`lookup` finds or makes one kernel, `many` makes many in a `pool` of processes; `names` says what a kernel is called
and `places` how it lies in folders and archives. Needs no GPU, and a compiler only where something is missing.
"""

from eagle3core.kernels.cubins.lookup import CACHE_VARIABLE, CUBINS_VARIABLE, cache_folder, cubin, is_stored
from eagle3core.kernels.cubins.many import Compilation, Compiling, build_cubins, compile_missing
from eagle3core.kernels.cubins.names import cubin_name, digest
from eagle3core.kernels.cubins.places import read_from, write_archive

__all__ = [
    "CACHE_VARIABLE",
    "CUBINS_VARIABLE",
    "Compilation",
    "Compiling",
    "build_cubins",
    "cache_folder",
    "compile_missing",
    "cubin",
    "cubin_name",
    "digest",
    "is_stored",
    "read_from",
    "write_archive",
]
