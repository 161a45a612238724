from tests.topology.sample_hosts import B200, PERLMUTTER, sample_host

from ronde.render import tabulate_classes, tabulate_speeds
from ronde.topology import GpuDevice, HostTopology, NumaNode, classify, find_paths


class TestClasses:
    def test_perlmutters(self):
        assert (
            tabulate_classes(classify(sample_host(PERLMUTTER)))
            == """\
      GPU0  GPU1  GPU2  GPU3  NIC0  NIC1  NIC2  NIC3  CPU Affinity   NUMA Affinity
GPU0  X     NV4   NV4   NV4   PHB   SYS   SYS   SYS   48-63,112-127  3
GPU1  NV4   X     NV4   NV4   SYS   SYS   SYS   PHB   32-47,96-111   2
GPU2  NV4   NV4   X     NV4   SYS   SYS   PHB   SYS   16-31,80-95    1
GPU3  NV4   NV4   NV4   X     SYS   PHB   SYS   SYS   0-15,64-79     0
NIC0  PHB   SYS   SYS   SYS   X     SYS   SYS   SYS   48-63,112-127  3
NIC1  SYS   SYS   SYS   PHB   SYS   X     SYS   SYS   0-15,64-79     0
NIC2  SYS   SYS   PHB   SYS   SYS   SYS   X     SYS   16-31,80-95    1
NIC3  SYS   PHB   SYS   SYS   SYS   SYS   SYS   X     32-47,96-111   2

  NIC0: cxi3
  NIC1: cxi0
  NIC2: cxi1
  NIC3: cxi2

  X    = itself
  SYS  = over PCIe and the links between processors
  PHB  = over PCIe and a host bridge, within one NUMA node
  NV#  = over # NVLinks
"""
        )

    def test_the_legend_has_the_words_that_occur(self):
        text = tabulate_classes(classify(sample_host(B200)))
        assert "NV# " in text
        for word in ("SYS", "NODE", "PHB", "PXB", "PIX", "XGMI", "?"):
            assert f"{word:<4} =" not in text
        assert "?    = unknown" in tabulate_classes(
            classify(HostTopology(gpus=(GpuDevice("", 0), GpuDevice("", 1))))
        )

    def test_a_list_of_many_cpus_is_cut_at_a_comma(self):
        node = NumaNode(0, cpus=tuple(range(0, 256, 2)))
        host = HostTopology(numa_nodes=(node,), gpus=(GpuDevice("", 0, node=0),))
        text = tabulate_classes(classify(host))
        assert "0,2,4,6,8,10,12,14,... " in text
        assert "256" not in text

    def test_nothing_is_said_to_be_nothing(self):
        empty = classify(HostTopology())
        assert tabulate_classes(empty) == "no GPU and no network adapter\n"
        paths = find_paths(HostTopology())
        assert tabulate_speeds(paths, empty) == "no GPU and no network adapter\n"


class TestSpeeds:
    def test_a_host_without_gpus_shows_its_adapters(self):
        host = sample_host(PERLMUTTER)._replace(gpus=(), links=())
        text = tabulate_speeds(find_paths(host), classify(host))
        assert text.splitlines()[1].startswith("NIC0")
