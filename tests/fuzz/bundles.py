def fuzz(watch): pass
