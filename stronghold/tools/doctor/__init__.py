"""`stronghold doctor`: measures a machine, and lists problems that its user can solve.

`selftest` is `stronghold test`.
"""
