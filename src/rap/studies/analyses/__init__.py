"""Figures and studies made from result files and from models."""
