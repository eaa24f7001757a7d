"""What the paper looks into beside accuracy: shift, transductive moments, and storage."""
