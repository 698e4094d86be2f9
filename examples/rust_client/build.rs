//! Generates Rust code from the protos; nothing else of Percolator is needed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut config = tonic_prost_build::Config::new();
    config.protoc_executable(protoc_bin_vendored::protoc_bin_path()?);
    tonic_prost_build::configure()
        .build_server(false)
        .build_transport(false)
        .compile_with_config(
            config,
            &[
                "../../protos/percolator/v1/gateway.proto",
                "../../protos/percolator/v1/master.proto",
            ],
            &["../../protos"],
        )?;
    println!("cargo:rerun-if-changed=../../protos");
    Ok(())
}
