"""libstronghold for Python: kernels and their arguments.

`loader` loads the library, `segments` has a kernel's arguments, `kernels` the kernels.
"""

from stronghold.native.kernels import MAX_CONSTANTS as MAX_CONSTANTS
from stronghold.native.kernels import MAX_MOMENTS as MAX_MOMENTS
from stronghold.native.kernels import MAX_NUMBERS as MAX_NUMBERS
from stronghold.native.kernels import Kernels as Kernels
from stronghold.native.kernels import Pool as Pool
from stronghold.native.kernels import UpdateBatch as UpdateBatch
from stronghold.native.kernels import constants as constants
from stronghold.native.kernels import isa as isa
from stronghold.native.kernels import isas as isas
from stronghold.native.kernels import load as load
from stronghold.native.kernels import optimizers as optimizers
from stronghold.native.kernels import store as store
from stronghold.native.kernels import touch as touch
from stronghold.native.loader import Closeable as Closeable
from stronghold.native.loader import available_cores as available_cores
from stronghold.native.loader import library as library
from stronghold.native.loader import naming_threads as naming_threads
from stronghold.native.segments import Rows as Rows
from stronghold.native.segments import Segments as Segments
from stronghold.native.segments import Target as Target
from stronghold.native.segments import UpdateSegment as UpdateSegment
from stronghold.native.segments import rows as rows
from stronghold.native.segments import targets_of as targets_of
