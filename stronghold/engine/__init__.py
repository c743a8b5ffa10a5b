"""DeepSpeed's border: `StrongholdEngine`, and the files around it.

engine        the engine that a user, an LR schedule or a monitor sees
refusals      the methods and calls that it refuses
live_engines  the engines of this process
dispatch      `initialize`: which engine a config asks for, and with which optimizer
backward      `loss.backward()` that the user's code calls
checkpoints   the saves and loads of one engine
inspection    the read-only view that `engine.inspect()` returns
monitors      DeepSpeed's monitors, which get the values of each step
"""

from stronghold.engine.engine import StrongholdEngine as StrongholdEngine
