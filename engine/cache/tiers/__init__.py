"""Where blocks lie beside the device, behind one seam (tier.py): the host now, files and stores later."""
