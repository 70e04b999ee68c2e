//! Generates the harness's gRPC interfaces from `proto/`, without a protoc on the machine.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    for (file, server) in
        [("proto/cri.proto", false), ("proto/deviceplugin.proto", true), ("proto/podresources.proto", false)]
    {
        println!("cargo::rerun-if-changed={file}");
        let descriptors = protox::compile([file], ["proto"])?;
        tonic_prost_build::configure().build_server(server).compile_fds(descriptors)?;
    }
    Ok(())
}
