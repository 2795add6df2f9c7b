"""The loader search: the best DataLoader settings, found by few short trials over the user's own dataset.

`surface` estimates the rate of every setting from the trials made, `search` chooses what to try next, `live` makes
the trials in the user's process, `judge` says what it all means.
"""
