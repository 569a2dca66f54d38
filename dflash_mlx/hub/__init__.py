"""Where models are: folders, the hub's cache on this machine, repositories, and what their cards say."""
