"""A gang of ranks as the coordinator sees it: started, watched, replaced, spoken to."""
