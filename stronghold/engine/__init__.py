"""DeepSpeed's border: `StrongholdEngine`, and what stands around it.

engine       the engine as a user, an LR schedule or a monitor sees it; what it refuses, and why
attributes   attributes of DeepSpeed's engine that programs may read, and that nothing here uses
dispatch     `initialize`: which engine a config asks for, and with which optimizer
backward     loss.backward() that the user's code calls
checkpoints  the saves and loads of one engine
instruments  monitors, timers and the profiler around a step
"""

from stronghold.engine.engine import StrongholdEngine as StrongholdEngine
