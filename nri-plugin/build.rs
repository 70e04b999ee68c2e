//! Generates messages, client and server of the NRI from `proto/nri.proto`, without protoc.

use std::{env, fs, io, path::PathBuf};

use ttrpc_codegen::{Codegen, Customize, ProtobufCustomize};

fn main() -> io::Result<()> {
    println!("cargo::rerun-if-changed=proto/nri.proto");
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or(io::ErrorKind::NotFound)?);
    Codegen::new()
        .out_dir(&out)
        .input("proto/nri.proto")
        .include("proto")
        .rust_protobuf()
        .customize(Customize { async_all: true, ..Customize::default() })
        .rust_protobuf_customize(ProtobufCustomize::default())
        .run()?;
    // The generator's own module file has an inner attribute, which `include!` does not take.
    fs::write(out.join("mod.rs"), "pub mod nri;\npub mod nri_ttrpc;\n")
}
