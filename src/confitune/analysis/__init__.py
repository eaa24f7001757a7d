"""What the paper looks into beside accuracy: shift, transductive moments, storage, and its propositions."""
