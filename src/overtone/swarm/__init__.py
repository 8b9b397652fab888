"""A run that lives in object storage: replicas only write and read objects, and come and go as they like.

bucket → records → lineage (the anchor as a function of the commits) → rounds of one replica → Store
"""
