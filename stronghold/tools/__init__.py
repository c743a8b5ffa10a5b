"""Programs around the engine: the command, estimates, the doctor, pictures and conversions.

This room imports every other room. The engine imports nothing of it: training needs no tool.
"""
