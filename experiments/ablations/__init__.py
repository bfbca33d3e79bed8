"""Ablations: experiments that compare several arms and write a finding."""
