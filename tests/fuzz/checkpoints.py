def fuzz(watch):
    pass
