//! The harness against plain containerd: what must work before any GPU comes into it.

use integration::{
    driver::Wanted,
    host::Options,
    image::Image,
    node::Node,
    pod::{Container, Pod},
};

async fn bare_node() -> anyhow::Result<Node> {
    Node::start(&Options { driver: Wanted::None, ..Options::from_env()? }).await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn pods_run_in_images_of_every_c_library() {
    let node = bare_node().await.unwrap();
    for (name, release, libc) in
        [("bullseye", "bullseye", "2.31"), ("bookworm", "bookworm", "2.36"), ("trixie", "trixie", "2.41")]
    {
        let image = format!("local/{name}:1");
        node.import(&Image::debian(&image, release)).unwrap();
        let pod = Pod::new(name, Container::new("main", &image));
        let running = node.kubelet.run(&pod).await.unwrap();
        let shell =
            node.cri().exec(running.id("main"), &["/usr/bin/dash", "-c", "getconf GNU_LIBC_VERSION"]).await;
        let shell = shell.unwrap();
        assert_eq!(shell.code, 0, "{shell:?}");
        assert!(shell.stdout.contains(libc), "{shell:?}");
        node.kubelet.delete(&running).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root and containerd: run integration/test"]
async fn running_containers_survive_a_containerd_restart() {
    let mut node = bare_node().await.unwrap();
    node.import(&Image::busybox("local/busybox:1")).unwrap();
    let pod = Pod::new("plain", Container::new("main", "local/busybox:1").env("WHO", "me"));
    let running = node.kubelet.run(&pod).await.unwrap();
    let before = node.cri().info(running.id("main")).await.unwrap().pid;
    node.containerd.restart().await.unwrap();
    assert_eq!(node.cri().info(running.id("main")).await.unwrap().pid, before);
    let env = node.cri().exec(running.id("main"), &["env"]).await.unwrap();
    assert!(env.stdout.contains("WHO=me"), "{env:?}");
    node.kubelet.delete(&running).await.unwrap();
    assert!(node.cri().running().await.unwrap().is_empty());
}
