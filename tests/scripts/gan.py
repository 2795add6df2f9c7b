"""Two optimizers, two backward calls for each batch."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randint(0, 2, (64,)))
loader = DataLoader(data, batch_size=8)  # LOADER
generator, critic = nn.Linear(4, 8), nn.Linear(8, 1)
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3)
score = nn.BCEWithLogitsLoss()
for epoch in range(3):
    for real, _ in loader:
        real = real.to("cpu")  # COPY
        fake = generator(torch.randn(8, 4))
        critic_optimizer.zero_grad()
        loss = score(critic(real), torch.ones(8, 1)) + score(critic(fake.detach()), torch.zeros(8, 1))
        loss.backward()
        critic_optimizer.step()
        generator_optimizer.zero_grad()
        score(critic(fake), torch.ones(8, 1)).backward()
        generator_optimizer.step()
        print(loss.item())  # SYNC
