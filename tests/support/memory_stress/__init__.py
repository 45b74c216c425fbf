"""Servers that find their KV memory by themselves, filled to the brim: does anything run out of memory?"""
