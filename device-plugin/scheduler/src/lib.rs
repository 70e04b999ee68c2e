//! In the making.

#![forbid(unsafe_code)]
