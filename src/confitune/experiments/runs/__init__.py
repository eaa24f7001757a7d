"""What a run is and how it is done: recipe, identity, job, the places to run, and searches made of runs."""
