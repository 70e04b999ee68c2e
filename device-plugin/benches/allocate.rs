//! What kubelet's calls cost on a large node: 8 GPUs with 100 core and 1152 memory units (288 GiB) each.

use std::{collections::BTreeSet, hint::black_box};

use criterion::{Criterion, criterion_group, criterion_main};
use device_plugin::{
    allocate,
    offer::{Offer, OfferedGpu, Resource},
    prefer::{Wish, prefer},
};
use prost::Message;
use vcuda_config::{GpuUuid, Resources};

const GPUS: u8 = 8;
const MEMORY_UNITS: u32 = 1152;

fn offer() -> Offer {
    let gpu = |n| OfferedGpu {
        uuid: GpuUuid::from_bytes([n; 16]),
        numa_node: Some(u32::from(n / 4)),
        memory_units: MEMORY_UNITS,
        trouble: None,
    };
    Offer::new((0..GPUS).map(gpu).collect(), BTreeSet::new())
}

fn ids(offer: &Offer, resource: Resource) -> Vec<String> {
    offer.list(resource).devices.into_iter().map(|device| device.id).collect()
}

fn large_node(c: &mut Criterion) {
    let (offer, names) = (offer(), Resources::default());
    let (core, memory) = (ids(&offer, Resource::Core), ids(&offer, Resource::Memory));
    let mut group = c.benchmark_group("8x100x1152");

    let mut grant = |name, resource, ids: &[String]| {
        group.bench_function(name, |b| {
            b.iter(|| allocate::grant(resource, &names, &offer, black_box(ids).iter().map(String::as_str)));
        });
    };
    grant("allocate 20 core", Resource::Core, &core[..20]);
    grant("allocate 800 core", Resource::Core, &core);
    grant("allocate 32 memory", Resource::Memory, &memory[..32]);
    grant("allocate 1152 memory", Resource::Memory, &memory[..1152]);

    let mut wish = |name, resource, available: &[String], size| {
        group.bench_function(name, |b| {
            b.iter(|| {
                let wish = Wish { available: black_box(available), must_include: &[], size };
                prefer(resource, &names, &offer, wish, &[])
            });
        });
    };
    wish("prefer 20 core", Resource::Core, &core, 20);
    wish("prefer 400 core", Resource::Core, &core, 400);
    wish("prefer 32 memory", Resource::Memory, &memory, 32);

    group.bench_function("list memory", |b| {
        b.iter(|| black_box(&offer).list(Resource::Memory).encode_to_vec())
    });
    group.finish();
}

criterion_group!(benches, large_node);
criterion_main!(benches);
