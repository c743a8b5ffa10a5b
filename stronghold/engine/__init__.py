"""DeepSpeed's border: `StrongholdEngine`, and what stands around it.

engine       the engine as a user, an LR schedule or a monitor sees it
dispatch     `initialize`: which engine a config asks for, and with which optimizer
surface      what of DeepSpeed's engine does not apply, with reasons
instruments  monitors, timers and the profiler around a step
"""

from stronghold.engine.engine import StrongholdEngine as StrongholdEngine
