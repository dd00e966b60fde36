"""Device code of the list structure: a persistent work list, one CTA per SM. Geometry: megamoe_aot/work_list.py."""
